"""Several engines as processes of Ray Serve, behind one System: who routes to them, what runs in each, and who asks them."""
