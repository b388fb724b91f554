"""Traffic sent to a real server: exact token counts at exact times, and what became of every request."""
