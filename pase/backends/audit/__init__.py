"""Audits: compare plans with what the frameworks really run."""
