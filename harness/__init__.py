"""plan → run → judge → report. The manager starts workers and never imports torch."""
