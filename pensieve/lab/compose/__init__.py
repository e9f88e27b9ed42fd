"""Read the configuration in conf/, check it, plan a trial by it, and build the objects that it names."""
