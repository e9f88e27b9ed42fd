"""Figures, tables and reports of what was recorded: reads the results database, and runs nothing."""
