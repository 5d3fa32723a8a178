"""What people look at: lists of runs, and a page of charts."""
