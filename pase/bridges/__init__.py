"""What lies between traces, schedules and plans: profiles from traces, runs replayed under another plan."""
