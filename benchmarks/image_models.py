"""Models of images and volumes, from their published configurations, with random weights."""

from __future__ import annotations

import itertools
from functools import partial

import torch
import torch.nn.functional as F
from blocks import LayerNorm2d, dcgan, pose, sam
from torch import Tensor, nn
from zoo import Model, Residual


class Pix2Pix(nn.Module):
    """The generator of pix2pix for 256 pixels: (N, 3, 256, 256) to the same."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        widths = tuple(width * each for each in (1, 2, 4, 8, 8, 8, 8, 8))
        self.down = nn.ModuleList(nn.Conv2d(a, b, 4, 2, 1) for a, b in zip((3, *widths), widths))
        self.down_norms = nn.ModuleList(nn.BatchNorm2d(each) for each in widths)
        outputs = (3, *widths)[-2::-1]
        given = (widths[-1], *(2 * each for each in outputs[:-1]))
        self.up = nn.ModuleList(nn.ConvTranspose2d(a, b, 4, 2, 1) for a, b in zip(given, outputs))
        self.up_norms = nn.ModuleList(nn.BatchNorm2d(each) for each in outputs[:-1])

    def forward(self, x: Tensor) -> Tensor:
        """The image."""
        skips = []
        for place, (layer, norm) in enumerate(zip(self.down, self.down_norms)):
            x = layer(F.leaky_relu(x, 0.2) if place else x)
            x = norm(x) if 0 < place < len(self.down) - 1 else x
            skips.append(x)
        for layer, norm, skip in zip(self.up, self.up_norms, skips[-2::-1]):
            x = torch.cat([skip, norm(layer(F.relu(x)))], 1)
        return torch.tanh(self.up[-1](F.relu(x)))


class UNet(nn.Module):
    """U-Net in two or three dimensions: widths double by default, two convolutions at each level."""

    def __init__(self, dims: int, channels: int, widths: tuple[int, ...], classes: int) -> None:
        super().__init__()
        convolution, up = getattr(nn, f"Conv{dims}d"), getattr(nn, f"ConvTranspose{dims}d")
        norm = nn.BatchNorm2d if dims == 2 else partial(nn.InstanceNorm3d, affine=True)

        def twice(a: int, b: int, stride: int = 1) -> nn.Module:
            layers: list[nn.Module] = []
            for given, step in ((a, stride), (b, 1)):
                layers += [convolution(given, b, 3, step, 1), norm(b), nn.LeakyReLU(0.01, inplace=True)]
            return nn.Sequential(*layers)

        pairs = list(itertools.pairwise(widths))
        self.first = twice(channels, widths[0])
        self.down = nn.ModuleList(twice(a, b, 2) for a, b in pairs)
        self.up = nn.ModuleList(up(b, a, 2, 2) for a, b in reversed(pairs))
        self.merge = nn.ModuleList(twice(2 * a, a) for a, _ in reversed(pairs))
        self.last = convolution(widths[0], classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(N, channels, *size) to (N, classes, *size)."""
        skips = [self.first(x)]
        for down in self.down:
            skips.append(down(skips[-1]))
        x = skips.pop()
        for up, merge in zip(self.up, self.merge):
            x = merge(torch.cat([skips.pop(), up(x)], 1))
        result: Tensor = self.last(x)
        return result


def fsrcnn() -> nn.Module:
    """FSRCNN, four times."""
    layers: list[nn.Module] = [nn.Conv2d(1, 56, 5, 1, 2), nn.PReLU(56), nn.Conv2d(56, 12, 1), nn.PReLU(12)]
    for _ in range(4):
        layers += [nn.Conv2d(12, 12, 3, 1, 1), nn.PReLU(12)]
    return nn.Sequential(*layers, nn.Conv2d(12, 56, 1), nn.PReLU(56), nn.ConvTranspose2d(56, 1, 9, 4, 4, 3))


def mask_head(width: int = 256) -> nn.Module:
    """Mask R-CNN's mask branch: four convolutions and the predictor; a sample is 25 boxes."""
    layers: list[nn.Module] = [nn.Flatten(0, 1)]
    for _ in range(4):
        layers += [nn.Conv2d(width, width, 3, 1, 1), nn.ReLU(inplace=True)]
    predictor = (nn.ConvTranspose2d(width, width, 2, 2), nn.ReLU(inplace=True), nn.Conv2d(width, 91, 1))
    return nn.Sequential(*layers, *predictor, nn.Unflatten(0, (-1, 25)))


class Neck(nn.Module):
    """PointPillars' neck: three scales, each brought to the first one's size by a layer, side by side."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        up = 2 * width
        self.up = nn.ModuleList(
            nn.Sequential(nn.ConvTranspose2d(s * width, up, s, s, bias=False), nn.BatchNorm2d(up, 1e-3), nn.ReLU())
            for s in (1, 2, 4)
        )

    def forward(self, fine: Tensor, middle: Tensor, coarse: Tensor) -> Tensor:
        """(N, 64, H, W), (N, 128, H/2, W/2), (N, 256, H/4, W/4) to (N, 384, H, W)."""
        return torch.cat([up(x) for up, x in zip(self.up, (fine, middle, coarse))], 1)


def cyclegan(width: int = 64, blocks: int = 9) -> nn.Module:
    """The generator of CycleGAN for 256 pixels: (N, 3, 256, 256) to the same."""

    def normed(layer: nn.Module, channels: int) -> list[nn.Module]:
        return [layer, nn.InstanceNorm2d(channels), nn.ReLU(True)]

    layers = [nn.ReflectionPad2d(3), *normed(nn.Conv2d(3, width, 7), width)]
    for a in (width, 2 * width):
        layers += normed(nn.Conv2d(a, 2 * a, 3, 2, 1), 2 * a)
    for _ in range(blocks):
        first, second = (
            [nn.ReflectionPad2d(1), *normed(nn.Conv2d(4 * width, 4 * width, 3), 4 * width)] for _ in range(2)
        )
        layers.append(Residual(*first, *second[:-1]))
    for a in (2 * width, width):
        layers += normed(nn.ConvTranspose2d(2 * a, a, 3, 2, 1, 1), a)
    return nn.Sequential(*layers, nn.ReflectionPad2d(3), nn.Conv2d(width, 3, 7), nn.Tanh())


def smoothing(channels: int) -> Tensor:
    """StyleGAN2's filter of four by four taps for each channel, for images of twice the size."""
    taps = torch.tensor([1.0, 3.0, 3.0, 1.0])
    return (4 * taps * taps[:, None] / 64).expand(channels, 1, 4, 4)


class Styled(nn.Module):
    """A convolution of StyleGAN2's whose weights have styles, with noise; ``up``: of twice the size, and smoothed.

    ``grouped``: the samples are groups of one convolution, each with weights of its own. Else styles are factors of
    what the convolution is given, and what keeps its variance those of its result, which the filter leaves as they are.
    """

    def __init__(self, latent: int, a: int, b: int, size: int, up: bool, grouped: bool) -> None:
        super().__init__()
        self.style = nn.Linear(latent, a)
        nn.init.ones_(self.style.bias)
        up_layer = nn.ConvTranspose2d(a, b, 3, 2, bias=False)
        self.layer = up_layer if up else nn.Conv2d(a, b, 3, 1, 1, bias=False)
        self.strength, self.bias = nn.Parameter(torch.zeros(())), nn.Parameter(torch.zeros(b, 1, 1))
        self.register_buffer("noise", torch.randn(size, size))
        self.register_buffer("filter", smoothing(b))
        self.up, self.grouped = up, grouped

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        """(N, a, H, W) and (N, latent) to (N, b, H, W), or twice the size."""
        styles, weight = self.style(w), self.layer.weight
        squares = weight.square().sum((2, 3))
        factors = (styles.square() @ (squares if self.up else squares.T) + 1e-8).rsqrt()
        if self.grouped:
            each = (styles[:, :, None] * factors[:, None]) if self.up else (styles[:, None] * factors[:, :, None])
            own, count = (weight * each[..., None, None]).flatten(0, 1), x.shape[0]
            x = x.flatten(0, 1)[None]
            if self.up:
                x = F.conv_transpose2d(x, own, stride=2, groups=count)
            else:
                x = F.conv2d(x, own, padding=1, groups=count)
            x = x[0].unflatten(0, (count, -1))
        else:
            x = self.layer(x * styles[..., None, None]) * factors[..., None, None]
        if self.up:
            x = F.conv2d(x, self.filter, padding=1, groups=x.shape[1])
        x = x + self.noise * self.strength
        return torch.clamp(F.leaky_relu(x + self.bias, 0.2) * 2**0.5, -256, 256)


class StyleGAN2(nn.Module):
    """StyleGAN2's synthesis of 256 pixels from a latent: (N, 512) to (N, 3, 256, 256)."""

    def __init__(
        self, grouped: bool, widths: tuple[int, ...] = (512, 512, 512, 512, 256, 128, 64), latent: int = 512
    ) -> None:
        super().__init__()
        self.constant = nn.Parameter(torch.randn(widths[0], 4, 4))
        sizes = [4 << place for place in range(len(widths))]
        made = partial(Styled, latent, grouped=grouped)
        self.up = nn.ModuleList(made(a, b, s, True) for (a, b), s in zip(itertools.pairwise(widths), sizes[1:]))
        self.flat = nn.ModuleList(made(width, width, size, False) for width, size in zip(widths, sizes))
        self.styles = nn.ModuleList(nn.Linear(latent, width) for width in widths)
        self.colours = nn.ModuleList(nn.Conv2d(width, 3, 1) for width in widths)
        self.larger = nn.ModuleList(nn.ConvTranspose2d(3, 3, 4, 2, 1, groups=3, bias=False) for _ in widths[1:])
        for layer in self.larger:  # filters, which stay as they are
            layer.weight = nn.Parameter(smoothing(3).clone(), requires_grad=False)

    def forward(self, w: Tensor) -> Tensor:
        """The image, a sum over all sizes."""
        x, image = self.constant.expand(w.shape[0], -1, -1, -1), None
        for place, (flat, style, colours) in enumerate(zip(self.flat, self.styles, self.colours)):
            x = self.up[place - 1](x, w) if place else x
            x = flat(x, w)
            coloured = colours(x * style(w)[..., None, None])
            image = coloured if image is None else self.larger[place - 1](image) + coloured
        return image


class Sam2Upscaling(nn.Module):
    """The mask decoder's upscaling of SAM 2, which adds features of finer scales before what follows its layers."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        a, b = width // 4, width // 8
        first = (nn.ConvTranspose2d(width, a, 2, 2), LayerNorm2d(a), nn.GELU())
        self.upscaling = nn.Sequential(*first, nn.ConvTranspose2d(a, b, 2, 2), nn.GELU())

    def forward(self, x: Tensor, middle: Tensor, fine: Tensor) -> Tensor:
        """(N, 256, H, W), (N, 64, 2·H, 2·W), (N, 32, 4·H, 4·W) to the last of these."""
        first, norm, activation, second, last = self.upscaling
        x = activation(norm(first(x) + middle))
        result: Tensor = last(second(x) + fine)
        return result


class NormedResidual(nn.Module):
    """A residual block of MONAI's in three dimensions."""

    def __init__(self, a: int, b: int) -> None:
        super().__init__()
        convolution = partial(nn.Conv3d, bias=False)
        self.first, self.second = convolution(a, b, 3, 1, 1), convolution(b, b, 3, 1, 1)
        self.norms = nn.ModuleList(nn.InstanceNorm3d(b) for _ in range(3))
        self.activation = nn.LeakyReLU(0.01, inplace=True)
        self.shortcut = convolution(a, b, 1) if a != b else None

    def forward(self, x: Tensor) -> Tensor:
        """(N, a, *size) to (N, b, *size)."""
        y = self.norms[1](self.second(self.activation(self.norms[0](self.first(x)))))
        if self.shortcut is not None:
            x = self.norms[2](self.shortcut(x))
        y += x
        result: Tensor = self.activation(y)
        return result


class TransformerLayer(nn.Module):
    """Attention, and two linear layers, beside shortcuts; norms come first."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.project, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        """(N, tokens, width)."""
        queries, keys, values = self.project(self.norms[0](x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(queries, keys, values)
        x = x + self.out(found.transpose(1, 2).flatten(2))
        result: Tensor = x + self.narrow(F.gelu(self.wide(self.norms[1](x))))
        return result


class UNETR(nn.Module):
    """MONAI's UNETR: a transformer over patches of 16 voxels, and layers up from four of its stages."""

    def __init__(
        self,
        size: int = 96,
        features: int = 16,
        hidden: int = 768,
        layers: int = 12,
        heads: int = 12,
        classes: int = 14,
    ) -> None:
        super().__init__()
        self.grid, self.every = (size // 16,) * 3, layers // 4
        self.patches = nn.Conv3d(1, hidden, 16, 16)
        self.positions = nn.Parameter(0.02 * torch.randn(1, (size // 16) ** 3, hidden))
        self.layers = nn.ModuleList(TransformerLayer(hidden, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        up = partial(nn.ConvTranspose3d, kernel_size=2, stride=2, bias=False)
        widths = [features << place for place in range(4)]
        self.first = NormedResidual(1, features)
        self.skips = nn.ModuleList(
            nn.Sequential(up(hidden, w), *(each for _ in range(count) for each in (up(w, w), NormedResidual(w, w))))
            for w, count in zip(widths[1:], (2, 1, 0))
        )
        self.up = nn.ModuleList(up(a, b) for a, b in itertools.pairwise((hidden, *widths[::-1])))
        self.merge = nn.ModuleList(NormedResidual(2 * width, width) for width in widths[::-1])
        self.last = nn.Conv3d(features, 14, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(N, 1, *size) to (N, 14, *size)."""
        skips, tokens = [self.first(x)], self.patches(x).flatten(2).transpose(1, 2) + self.positions
        for place, layer in enumerate(self.layers):
            tokens = layer(tokens)
            if place in (self.every, 2 * self.every, 3 * self.every):
                skips.append(self.skips[len(skips) - 1](self._volume(tokens)))
        x = self._volume(self.norm(tokens))
        for up, merge in zip(self.up, self.merge):
            x = merge(torch.cat((up(x), skips.pop()), 1))
        result: Tensor = self.last(x)
        return result

    def _volume(self, tokens: Tensor) -> Tensor:
        return tokens.transpose(1, 2).unflatten(2, self.grid).contiguous()


def refined(channels: int) -> Residual:
    """A residual unit of DPT's, with activations first."""
    layers = (each for _ in range(2) for each in (nn.ReLU(), nn.Conv2d(channels, channels, 3, 1, 1)))
    return Residual(*layers)


class DPT(nn.Module):
    """What DPT has behind its large transformer: four of its stages, as pixels, are resampled and joined to depths."""

    def __init__(self, hidden: int = 1024, widths: tuple[int, ...] = (256, 512, 1024, 1024), width: int = 256) -> None:
        super().__init__()
        a, b, _, d = widths
        resampling = (
            nn.ConvTranspose2d(a, a, 4, 4),
            nn.ConvTranspose2d(b, b, 2, 2),
            nn.Identity(),
            nn.Conv2d(d, d, 3, 2, 1),
        )
        self.stages = nn.ModuleList(
            nn.Sequential(nn.Conv2d(hidden, each, 1), resampled, nn.Conv2d(each, width, 3, 1, 1, bias=False))
            for each, resampled in zip(widths, resampling)
        )
        self.given = nn.ModuleList(refined(width) for _ in widths[1:])
        self.joined = nn.ModuleList(refined(width) for _ in widths)
        self.projected = nn.ModuleList(nn.Conv2d(width, width, 1) for _ in widths)
        self.larger = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)
        self.head = nn.Sequential(
            nn.Conv2d(width, width // 2, 3, 1, 1), self.larger, nn.Conv2d(width // 2, 32, 3, 1, 1),
            nn.ReLU(), nn.Conv2d(32, 1, 1), nn.ReLU(),
        )  # fmt: skip
        nn.init.ones_(self.head[-2].bias)  # random depths would be negative, and 0

    def forward(self, first: Tensor, second: Tensor, third: Tensor, last: Tensor) -> Tensor:
        """Four times (N, 1024, H, W) to (N, 1, 16·H, 16·W)."""
        coarse = [stage(x) for stage, x in zip(self.stages, (first, second, third, last))][::-1]
        x = coarse[0]
        for place, (joined, projected) in enumerate(zip(self.joined, self.projected)):
            x = x + self.given[place - 1](coarse[place]) if place else x
            x = projected(self.larger(joined(x)))
        result: Tensor = self.head(x)
        return result


IMAGE_MODELS: dict[str, Model] = {
    "DCGAN": Model(dcgan, 256, ((100, 1, 1),)),
    "SimpleBaseline head": Model(pose, 64, ((2048, 8, 6),)),
    "Mask R-CNN branch": Model(mask_head, 16, ((25, 256, 14, 14),)),
    "SAM upscaling": Model(sam, 16, ((256, 64, 64),)),
    "SAM 2 upscaling": Model(Sam2Upscaling, 16, ((256, 64, 64), (64, 128, 128), (32, 256, 256))),
    "U-Net": Model(partial(UNet, dims=2, channels=3, widths=(64, 128, 256, 512, 1024), classes=2), 8, ((3, 256, 256),)),
    "pix2pix": Model(Pix2Pix, 16, ((3, 256, 256),)),
    "CycleGAN": Model(cyclegan, 8, ((3, 256, 256),)),
    "StyleGAN2 grouped": Model(partial(StyleGAN2, grouped=True), 16, ((512,),), calls=True),
    "StyleGAN2 scaled": Model(partial(StyleGAN2, grouped=False), 16, ((512,),)),
    "FSRCNN": Model(fsrcnn, 16, ((1, 128, 128),)),
    "PointPillars neck": Model(Neck, 4, ((64, 248, 216), (128, 124, 108), (256, 62, 54))),
    "DPT": Model(DPT, 8, ((1024, 24, 24),) * 4),
    "nnU-Net 3-D": Model(
        partial(UNet, dims=3, channels=1, widths=(32, 64, 128, 256, 320), classes=3), 2, ((1, 96, 96, 96),)
    ),
    "UNETR": Model(UNETR, 2, ((1, 96, 96, 96),)),
}
