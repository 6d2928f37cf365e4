"""Measures what a trainer sees: stalls, uploads, loads and resumes, each beside its reference in the same run.

usage: python -m trainers [--short] [--only NAME]... --record FILE --pictures FOLDER

``cargo xtask bench trainers`` makes the environment and runs the measures. The measures on links need root, for network namespaces.
"""
