# In a source tree the backends live in the top-level folder backends/.
__path__ = [__import__("os").path.join(__path__[0], "..", "..", "backends")]
