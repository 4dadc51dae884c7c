# SPDX-License-Identifier: Apache-2.0
"""Networks that the benchmarks share, written as anyone would write them in torch."""

from collections.abc import Callable

import torch
from torch import Tensor, nn


def conv_net(width: int = 8, num_classes: int = 10) -> nn.Sequential:
    """Three times [3x3 convolution, batch norm, softplus] with strides 2, 2 and 1, for 28x28 grey images."""

    def block(inputs: int, outputs: int, stride: int) -> list[nn.Module]:
        convolution = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        return [convolution, nn.BatchNorm2d(outputs), nn.Softplus()]

    return nn.Sequential(
        *block(1, width, 2),
        *block(width, 2 * width, 2),
        *block(2 * width, 4 * width, 1),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(36 * width, num_classes),
    )


def mlp(sizes: tuple[int, ...], activation: Callable[[], nn.Module] = nn.Softplus) -> nn.Sequential:
    """A multi-layer perceptron."""
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in zip(sizes[:-1], sizes[1:], strict=True):
        layers += [nn.Linear(inputs, outputs), activation()]
    return nn.Sequential(*layers[:-1])


def lenet(
    num_classes: int = 10,
    activation: Callable[[], nn.Module] = nn.Softplus,
    *,
    channels: int = 1,
    padding: int = 2,
) -> nn.Sequential:
    """LeNet-5 for 28x28 grey images; for 32x32 ones in colour with three channels and no padding."""
    return nn.Sequential(
        nn.Conv2d(channels, 6, 5, padding=padding),
        activation(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        activation(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(400, 120),
        activation(),
        nn.Linear(120, 84),
        activation(),
        nn.Linear(84, num_classes),
    )


def resnet18_cifar(num_classes: int = 10) -> nn.Module:
    """Torchvision's ResNet-18 with the 3x3 stem usual for 32x32 images; activations are left as they are."""
    import torchvision

    net = torchvision.models.resnet18(num_classes=num_classes)
    net.conv1 = nn.Conv2d(3, 64, 3, stride=1, padding=1, bias=False)
    net.maxpool = nn.Identity()
    return net


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with batch norm and SiLU, and a way around them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.SiLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        around = [nn.AvgPool2d(stride), nn.Conv2d(inputs, outputs, 1, bias=False), nn.BatchNorm2d(outputs)]
        self.around = nn.Sequential(*around) if inputs != outputs else nn.Identity()
        self.activation = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.inner(x) + self.around(x))


def small_resnet(width: int = 32, num_classes: int = 10) -> nn.Sequential:
    """Three residual blocks on a 4x4 convolution of stride 2, for 32x32 images in colour."""
    return nn.Sequential(
        nn.Conv2d(3, width, 4, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.SiLU(),
        ResidualBlock(width, width, 1),
        ResidualBlock(width, 2 * width, 2),
        ResidualBlock(2 * width, 4 * width, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, num_classes),
    )


class PreActivationBlock(nn.Module):
    """Twice [batch norm, SiLU, 3x3 convolution], and a way around them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.BatchNorm2d(inputs), nn.SiLU())
        self.inner = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.SiLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
        )
        self.around = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if inputs != outputs else None

    def forward(self, x: Tensor) -> Tensor:
        start = self.first(x)
        return self.inner(start) + (x if self.around is None else self.around(start))


def preact_resnet18(num_classes: int = 10, width: int = 64) -> nn.Sequential:
    """ResNet-18 with batch norm and activation before each convolution (He et al., 2016), for 32x32 colour images."""
    blocks: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1, bias=False)]
    inputs = width
    for outputs in (width, 2 * width, 4 * width, 8 * width):
        blocks.append(PreActivationBlock(inputs, outputs, 1 if inputs == outputs else 2))
        blocks.append(PreActivationBlock(outputs, outputs, 1))
        inputs = outputs
    blocks += [nn.BatchNorm2d(inputs), nn.SiLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*blocks, nn.Linear(inputs, num_classes))


def num_weights(net: nn.Module) -> int:
    """Count the weights of a network."""
    return sum(p.numel() for p in net.parameters())


if __name__ == "__main__":
    for name, net, shape in (
        ("conv_net", conv_net(), (1, 28, 28)),
        ("lenet", lenet(), (1, 28, 28)),
        ("lenet, colour", lenet(channels=3, padding=0), (3, 32, 32)),
        ("mlp", mlp((64, 50, 50, 10)), (1, 8, 8)),
        ("small_resnet", small_resnet(), (3, 32, 32)),
        ("preact_resnet18", preact_resnet18(), (3, 32, 32)),
    ):
        print(name, num_weights(net), tuple(net(torch.zeros(2, *shape)).shape))
