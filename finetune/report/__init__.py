"""HTML pages and plots from run folders."""
