"""HTTP: the pages, their forms, which client gets them, and the page for people. It reads no source."""
