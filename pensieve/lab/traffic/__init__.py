"""Recorded traffic: one file format for what a server was asked, when, and what it told of its cache."""
