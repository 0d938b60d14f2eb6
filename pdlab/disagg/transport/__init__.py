"""How K and V get from one worker to another: one interface, and several ways."""
