"""Optimizers by a key, and their parameter groups."""

from collections.abc import Sequence

from torch import Tensor, nn
from torch.optim import SGD, AdamW, Muon, Optimizer

from tokendrop.config.train import TrainConfig
from tokendrop.train.optimizer_state import Bf16AdamW, Bf16Muon, Bf16Sgd


def build_optimizers(model: nn.Module, config: TrainConfig) -> list[Optimizer]:
    """The optimizers of `train.optimizer`; matrices decay, biases and norms do not.

    `muon` orthogonalizes the updates of the layers' matrices (Jordan et al. 2024), scaled to the size of AdamW's, so
    that one learning rate fits both (Liu et al. 2025, arXiv:2502.16982); embeddings, biases, norms and heads are
    AdamW's. It does so in bf16, in which the order of a sum over workers shows.
    """
    parameters = list(model.parameters())
    matrices = _matrices_of_layers(model) if config.optimizer == "muon" else []
    taken = {id(parameter) for parameter in matrices}
    others = _groups([parameter for parameter in parameters if id(parameter) not in taken], config.weight_decay)
    is_bf16 = config.optimizer_state == "bf16"
    sgd, adamw, muon = (Bf16Sgd, Bf16AdamW, Bf16Muon) if is_bf16 else (SGD, AdamW, Muon)
    if config.optimizer == "sgd":
        return [sgd(others, lr=config.peak_lr, momentum=config.momentum)]
    betas = config.beta1, config.beta2
    rest = adamw(others, lr=config.peak_lr, betas=betas, eps=config.epsilon, fused=True)
    if config.optimizer == "adamw":
        return [rest]
    how = {"momentum": config.momentum, "weight_decay": config.weight_decay, "adjust_lr_fn": "match_rms_adamw"}
    return [muon(matrices, lr=config.peak_lr, **how), rest]


def _groups(parameters: Sequence[Tensor], weight_decay: float) -> list[dict[str, object]]:
    """Matrices and the rest; where workers share parameters out in several ways, those of each way, for torch updates
    the parameters of a group at once."""
    shared: dict[object, list[Tensor]] = {}
    for parameter in parameters:
        shared.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return [
        {"params": [p for p in alike if (p.ndim >= 2) == decays], "weight_decay": weight_decay if decays else 0.0}
        for alike in shared.values()
        for decays in (True, False)
    ]


def _matrices_of_layers(model: nn.Module) -> list[nn.Parameter]:
    layers = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return list({id(p): p for one in layers for p in one.parameters() if p.ndim == 2}.values())
