"""Imports torch before warnings are errors: loading it and torch_tpu warns about their own deprecated calls."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch  # noqa: F401
