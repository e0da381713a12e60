"""Connects traces with schedules and plans: profiles from traces, and traced runs replayed under another plan."""
