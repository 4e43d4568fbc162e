"""Reproduction of the paper: its tables and claims, planned experiments, results folder, verdicts and pages."""
