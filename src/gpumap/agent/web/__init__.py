"""HTTP: the pages, their formats, access control, and the page for people. It reads no source."""
