"""Values as people type them."""
