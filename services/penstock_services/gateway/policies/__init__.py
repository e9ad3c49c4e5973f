"""Policy versions: listing, promotion, pins and roll backs."""
