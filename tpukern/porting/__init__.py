"""What a project written for CUDA needs to run on the `tpu` device: `tpukern port`. Nothing of it is imported or run."""

from tpukern.porting.patching import patch
from tpukern.porting.reading import Finding, Report, read

__all__ = ["Finding", "Report", "patch", "read"]
