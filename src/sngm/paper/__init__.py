"""Reproduction of the paper on SNGM: its tables and claims, planned experiments, results folder, verdicts and pages."""
