"""Tests of the web page in Chromium."""
