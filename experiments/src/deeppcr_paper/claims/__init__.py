"""What the paper claims, what results of ours say to it, and by which rules it holds. It knows nothing of pages."""
