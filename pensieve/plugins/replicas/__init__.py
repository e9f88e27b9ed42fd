"""Several engines as actors of Ray, behind one System: how they live, what runs in each, and who asks them."""
