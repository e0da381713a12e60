"""Diagnoses runs and makes reports."""
