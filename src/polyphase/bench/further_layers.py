"""Layers beside those of `polyphase.bench.layers`: volumes and video, one image or second at a time, and the holes."""

from __future__ import annotations

from polyphase.problem import ConvTransposeProblem

make = ConvTransposeProblem.make

#: The three-dimensional problems of KernelBench's level 1, except for the record's 61.
KERNELBENCH_VOLUMES: dict[str, ConvTransposeProblem] = {
    "KernelBench 58": make((16, 32, 16, 32, 64), 16, (3, 5, 7)),
    "KernelBench 68": make((16, 32, 64, 64, 64), 64, (3, 5, 5)),
    "KernelBench 70": make((8, 48, 96, 96, 96), 24, 3),
    "KernelBench 72": make((8, 32, 12, 24, 48), 32, (3, 5, 7), 2, (1, 2, 3), 1, groups=4),
    # Its file gives the groups in the place of the output padding, which it ignores: what runs has one group.
    "KernelBench 73": make((4, 32, 32, 64, 128), 32, 3, stride=2, padding=1),
    "KernelBench 77": make((16, 32, 16, 32, 32), 64, 3, stride=2, padding=1, dilation=2),
}

_FRAMES = (1, 2, 2)  # strides: frames, or slices, stay as many as they are

#: Decoders of video and of volumes.
VOLUMES: dict[str, ConvTransposeProblem] = {
    "73 grouped, as its title has it": make((4, 32, 32, 64, 128), 32, 3, stride=2, padding=1, groups=4),
    "video, (3, 4, 4)": make((1, 256, 16, 32, 32), 128, (3, 4, 4), padding=1, stride=_FRAMES),
    "video, (1, 4, 4)": make((2, 128, 16, 56, 56), 64, (1, 4, 4), padding=(0, 1, 1), stride=_FRAMES),
    "video, (1, 2, 2)": make((1, 256, 16, 32, 32), 128, (1, 2, 2), bias=True, stride=_FRAMES),
    "VideoGPT": make((4, 240, 4, 32, 32), 240, 4, stride=2, padding=1, bias=True),
    "TASED-Net, 1st": make((1, 1024, 4, 7, 12), 832, (1, 4, 4), padding=(0, 1, 1), stride=_FRAMES),
    "TASED-Net, 3rd": make((1, 480, 4, 28, 48), 192, (1, 4, 4), padding=(0, 1, 1), stride=_FRAMES),
    "nnU-Net 3-D up, thick slices": make((2, 320, 10, 16, 16), 256, (1, 2, 2), bias=True, stride=_FRAMES),
    "3-D U-Net, kernel 3": make((2, 128, 32, 32, 32), 64, 3, stride=2, padding=1, output_padding=1, bias=True),
    "Swin UNETR, 1st": make((1, 768, 3, 3, 3), 384, 2, stride=2),
    "Swin UNETR, last": make((1, 48, 48, 48, 48), 48, 2, stride=2),
}

#: One image, volume or second at a time.
BATCH_ONE: dict[str, ConvTransposeProblem] = {
    "HiFi-GAN up 2, batch 1": make((1, 256, 1024), 128, 16, stride=8, padding=4, bias=True),
    "HiFi-GAN up 3, batch 1": make((1, 128, 8192), 64, 4, stride=2, padding=1, bias=True),
    "HiFi-GAN up 4, batch 1": make((1, 64, 16384), 32, 4, stride=2, padding=1, bias=True),
    "BigVGAN up 1, batch 1": make((1, 1536, 100), 768, 8, stride=4, padding=2, bias=True),
    "inverse STFT of 1024, batch 1": make((1, 1026, 500), 1, 1024, stride=256),
    "EnCodec up 1, batch 1": make((1, 512, 75), 256, 16, stride=8, bias=True),
    "EnCodec up 2, batch 1": make((1, 256, 600), 128, 10, stride=5, bias=True),
    "EnCodec up 3, batch 1": make((1, 128, 3000), 64, 8, stride=4, bias=True),
    "DAC up 1, batch 1": make((1, 1536, 86), 768, 16, stride=8, padding=4, bias=True),
    "DAC up 4, batch 1": make((1, 192, 22016), 96, 4, stride=2, padding=1, bias=True),
    "SAM mask decoder, 1st, batch 1": make((1, 256, 64, 64), 64, 2, stride=2, bias=True),
    "SAM mask decoder, 2nd, batch 1": make((1, 64, 128, 128), 32, 2, stride=2, bias=True),
    "SimpleBaseline pose head, 1st, batch 1": make((1, 2048, 8, 6), 256, 4, stride=2, padding=1),
    "CenterNet ResNet, 1st, batch 1": make((1, 512, 16, 16), 256, 4, stride=2, padding=1),
    "PointPillars ×2, batch 1": make((1, 128, 124, 108), 128, 2, stride=2),
    "PointPillars ×4, batch 1": make((1, 256, 62, 54), 128, 4, stride=4),
    "nnU-Net 3-D up, deepest, batch 1": make((1, 320, 8, 8, 8), 320, 2, stride=2),
    "nnU-Net 3-D up, last, batch 1": make((1, 64, 64, 64, 64), 32, 2, stride=2),
}

#: Those of one image or second that are layers of further models already.
ALSO_BATCH_ONE = ("HiFi-GAN up 1, batch 1", "SimpleBaseline pose head, 3rd, batch 1")

#: Layers that fell between the schedules: far above their floor, or slower than PyTorch, at d55e6db.
HOLES: dict[str, ConvTransposeProblem] = {
    "343 taps": make((2, 96, 32, 32, 32), 8, 7, stride=2, padding=3, output_padding=1),
    "KernelBench level 2, 77": make((16, 64, 16, 32, 32), 128, 5, bias=True),
    "three input channels in 3-D": make((32, 3, 24, 24, 24), 384, 3, padding=1),
    "groups of 16 in 3-D": make((2, 512, 48, 48, 48), 512, (3, 4, 4), groups=32, stride=_FRAMES),
    "groups of 8, kernel 10": make((1, 64, 128, 128), 64, 10, stride=5, groups=8),
    "groups of 8 in 1-D": make((16, 32, 4096), 32, 16, stride=8, groups=4),
    "rows of 201": make((32, 192, 100, 100), 128, 3, stride=2),
    "rows of 8191": make((4, 512, 8191), 32, 2, stride=2),
    "small images, kernel 10": make((32, 768, 7, 7), 24, 10, stride=5, padding=3, output_padding=1),
    "everything odd": make((3, 37, 61, 83), 29, (4, 5), stride=(3, 2)),
    "inverse STFT of 1024": make((8, 1026, 500), 1, 1024, stride=256),
    "codec, kernel 4096": make((2, 1024, 200), 1, 4096, stride=1024, padding=1024),
    "three output channels, kernel 9": make((1, 64, 720, 1280), 3, 9, stride=3),
}

#: Holes that are layers of other suites.
ALSO_HOLES = (
    "KernelBench 58",
    "KernelBench 61",
    "KernelBench 72",
    "inverse STFT of 1024, batch 1",
    "FSRCNN ×4",
    "FCN-8s, ×8",
    "DCGAN generator, 2nd",
    "SimpleBaseline pose head, 1st",
)
