"""What people and machines read about a run: live faces, end reports, plans, measurements."""
