"""Run one trial and record it; run a sweep of trials."""
