"""Let torchvision be imported beside a CPU build of torch, in the virtual environment that runs this.

Its wheels on PyPI are built for CUDA's torch. Beside another build their compiled operators don't load, and the import
fails for want of `nms`. Transforms need no operator; so it is declared, without anything behind it.
"""

from importlib.util import find_spec
from pathlib import Path

DECLARED = """

if not _has_ops():
    _missing = torch.library.Library("torchvision", "DEF")
    for _name in ("nms", "qnms"):
        _missing.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""

try:
    import torchvision  # noqa: F401
except RuntimeError:
    spec = find_spec("torchvision")
    assert spec is not None
    assert spec.origin is not None
    with (Path(spec.origin).parent / "extension.py").open("a") as extension:
        extension.write(DECLARED)
