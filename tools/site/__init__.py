"""What the documentation site needs beside MkDocs: links that lead out of docs/, a page for each C++ header, and
docstrings as Markdown. MkDocs and mkdocstrings call it; mkdocs.yml names the files.
"""
