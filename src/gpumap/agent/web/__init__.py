"""The HTTP face: what is served, in which form, to whom, and the page for people. It asks no source."""
