"""Small models at hand without a hub: which there are, and under which licence."""
