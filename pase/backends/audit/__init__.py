"""Plans compared with what the frameworks really run."""
