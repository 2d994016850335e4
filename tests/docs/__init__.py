"""Tests of the documents: tables, links, commands, queries and figures say what the code does."""
