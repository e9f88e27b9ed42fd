"""Several engines, a process each, behind one System: what runs in each of them, and who asks them."""
