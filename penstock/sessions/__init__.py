"""Sessions and tasks in Redis: the recorded calls of harnesses, and the work that is handed to them."""
