"""The Ray actors of the roles, as the controller sees them: where it places them, how it calls and restarts them."""
