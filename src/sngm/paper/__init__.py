"""Reproduction of the paper: its tables and claims, planned experiments, kept runs, verdicts and pages."""
