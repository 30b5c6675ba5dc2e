"""What results say: reading them, comparing two of them, and a page of one."""
