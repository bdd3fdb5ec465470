"""Recipes for other libraries, with the real packages: those that are not installed are left out.

`scripts/libraries.sh` installs them, with ``--all`` also those that need torchvision or a C++ compiler.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import polyphase
from polyphase.bench.target import load_target
from processes import run_python

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]


def assert_accelerates(model: nn.Module, call: Callable[[nn.Module], Tensor], layers: int) -> None:
    """All the layers are swapped, and the model computes the same, also from a state_dict of the other."""
    model = model.eval()
    with torch.no_grad():
        torch.manual_seed(1)
        expected = call(model)
        accelerated = copy.deepcopy(model)
        report = polyphase.accelerate(accelerated)
        assert len(report.swapped) == layers, report
        assert not report.left
        accelerated.load_state_dict(model.state_dict())
        torch.manual_seed(1)
        torch.testing.assert_close(call(accelerated), expected, rtol=1e-3, atol=1e-4)
        polyphase.restore(accelerated)
        torch.manual_seed(1)
        torch.testing.assert_close(call(accelerated), expected)


def with_torchvision(name: str) -> Any:
    """A library that imports torchvision, which has to be of this PyTorch, and built as it is."""
    try:
        pytest.importorskip("torchvision")
    except RuntimeError as failure:
        pytest.skip(f"torchvision is another PyTorch's: {failure}")
    return pytest.importorskip(name)


def sound(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def test_transformers_hifi_gan() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.SpeechT5HifiGanConfig(
        model_in_dim=8, upsample_initial_channel=16, upsample_rates=[4, 2], upsample_kernel_sizes=[8, 4]
    )
    assert_accelerates(transformers.SpeechT5HifiGan(config), lambda model: model(sound(1, 11, 8)), 2)


def test_transformers_encodec() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.EncodecConfig(num_filters=4, hidden_size=16, codebook_dim=16, codebook_size=32)
    assert_accelerates(
        transformers.EncodecModel(config), lambda model: model(sound(1, 1, 1600), bandwidth=1.5).audio_values, 4
    )


def test_transformers_dac() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.DacConfig(encoder_hidden_size=4, decoder_hidden_size=32, n_codebooks=2, codebook_size=16)
    assert_accelerates(transformers.DacModel(config), lambda model: model(sound(1, 1, 2048)).audio_values, 4)


def test_transformers_mimi() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.MimiConfig(
        num_filters=4, hidden_size=16, codebook_dim=8, codebook_size=16, vector_quantization_hidden_dimension=8,
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, intermediate_size=32, head_dim=8,
        num_quantizers=4, num_semantic_quantizers=1, upsample_groups=16,
    )  # fmt: skip
    assert_accelerates(transformers.MimiModel(config), lambda model: model(sound(1, 1, 3840)).audio_values, 5)


def test_transformers_vits() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.VitsConfig(
        vocab_size=20, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, ffn_dim=16, flow_size=16,
        spectrogram_bins=9, upsample_initial_channel=16, upsample_rates=[4, 2], upsample_kernel_sizes=[8, 4],
        prior_encoder_num_wavenet_layers=1, posterior_encoder_num_wavenet_layers=1,
    )  # fmt: skip
    tokens = torch.arange(7)[None]
    assert_accelerates(transformers.VitsModel(config), lambda model: model(tokens).waveform, 2)


def test_transformers_sam() -> None:
    transformers = pytest.importorskip("transformers")
    vision = transformers.SamVisionConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=64, output_channels=32,
        mlp_dim=16, global_attn_indexes=[0], window_size=2, num_pos_feats=16,
    )  # fmt: skip
    prompt = transformers.SamPromptEncoderConfig(
        hidden_size=32, image_size=64, image_embedding_size=4, mask_input_channels=4
    )
    decoder = transformers.SamMaskDecoderConfig(
        hidden_size=32, mlp_dim=16, num_hidden_layers=1, num_attention_heads=2, iou_head_hidden_dim=16
    )
    config = transformers.SamConfig(vision_config=vision, prompt_encoder_config=prompt, mask_decoder_config=decoder)
    given = {"pixel_values": sound(1, 3, 64, 64), "input_points": torch.tensor([[[[10.0, 20.0]]]])}
    assert_accelerates(transformers.SamModel(config), lambda model: model(**given).pred_masks, 2)


def test_transformers_save_and_load(tmp_path: Path) -> None:
    """What an accelerated model saves, PyTorch's loads, and the other way round."""
    transformers = pytest.importorskip("transformers")
    config = transformers.SpeechT5HifiGanConfig(
        model_in_dim=8, upsample_initial_channel=16, upsample_rates=[4, 2], upsample_kernel_sizes=[8, 4]
    )
    model = transformers.SpeechT5HifiGan(config).eval()
    polyphase.accelerate(model)
    model.save_pretrained(tmp_path)
    loaded = transformers.SpeechT5HifiGan.from_pretrained(tmp_path).eval()
    assert not any(isinstance(each, polyphase.ConvTranspose1d) for each in loaded.modules())
    x = sound(1, 9, 8)
    with torch.no_grad():
        torch.testing.assert_close(loaded(x), model(x), rtol=1e-3, atol=1e-4)


def test_diffusers() -> None:
    diffusers = pytest.importorskip("diffusers")
    model = diffusers.AutoencoderOobleck(
        encoder_hidden_size=8, downsampling_ratios=[2, 4], decoder_channels=4, channel_multiples=[1, 2],
        decoder_input_channels=4, audio_channels=1,
    )  # fmt: skip
    assert_accelerates(model, lambda model: model(sound(1, 1, 64)).sample, 2)


def test_monai() -> None:
    nets = pytest.importorskip("monai.networks.nets")
    unet = nets.UNet(spatial_dims=3, in_channels=1, out_channels=2, channels=(4, 8, 16), strides=(2, 2))
    assert_accelerates(unet, lambda model: model(sound(1, 1, 16, 16, 16)), 2)
    basic = nets.BasicUNet(spatial_dims=2, features=(4, 4, 8, 8, 8, 4))
    assert_accelerates(basic, lambda model: model(sound(1, 1, 32, 32)), 4)


def test_lightning(tmp_path: Path) -> None:
    """A callback accelerates before the strategy wraps the model; its checkpoints are PyTorch's."""
    lightning = pytest.importorskip("lightning")

    class Accelerate(lightning.Callback):
        """The recipe."""

        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            polyphase.accelerate(pl_module)

    class Decoder(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.ConvTranspose2d(4, 2, 3, 2)

        def training_step(self, batch: Tensor, _: int) -> Tensor:
            return self.up(batch).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    torch.manual_seed(0)
    models = [Decoder()]
    models.append(copy.deepcopy(models[0]))
    for model, callbacks in zip(models, ([], [Accelerate()])):
        trainer = lightning.Trainer(
            max_steps=3, accelerator="cpu", logger=False, callbacks=callbacks, default_root_dir=tmp_path,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(model, torch.utils.data.DataLoader(sound(8, 4, 5, 5), batch_size=2))
    assert isinstance(models[1].up, polyphase.ConvTranspose2d)
    for a, b in zip(models[1].parameters(), models[0].parameters(), strict=True):
        torch.testing.assert_close(a, b)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    again = Decoder.load_from_checkpoint(tmp_path / "last.ckpt")
    assert type(again.up) is nn.ConvTranspose2d
    torch.testing.assert_close(again.up.weight, models[1].up.weight)


def test_hugging_face_accelerate() -> None:
    library = pytest.importorskip("accelerate")
    model = polyphase.accelerate(nn.Sequential(nn.ConvTranspose2d(4, 2, 3, 2))).model
    assert model is not None
    accelerator = library.Accelerator(cpu=True)
    prepared, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    before = model[0].weight.clone()
    accelerator.backward(prepared(sound(2, 4, 5, 5)).square().mean())
    optimizer.step()
    assert not torch.equal(model[0].weight, before)
    assert list(accelerator.get_state_dict(prepared)) == ["0.weight", "0.bias"]


@pytest.mark.parametrize("name", ["maskrcnn_resnet50_fpn", "keypointrcnn_resnet50_fpn"])
def test_torchvision_detection(name: str) -> None:
    detection = with_torchvision("torchvision.models.detection")
    torch.manual_seed(0)
    model = getattr(detection, name)(
        weights=None, weights_backbone=None, min_size=64, max_size=64, box_score_thresh=0.0, box_detections_per_img=3
    )
    output = "masks" if name.startswith("mask") else "keypoints_scores"

    def call(model: nn.Module) -> Tensor:
        found: Tensor = model([sound(3, 64, 64)])[0][output]
        assert found.numel() > 0
        return found

    assert_accelerates(model, call, 1)
    if output == "masks":
        report = polyphase.accelerate(model, fuse=True)
        assert [block.fused for block in report.blocks] == [("roi_heads.mask_predictor.relu",)]


def test_timm() -> None:
    timm = with_torchvision("timm")
    torch.manual_seed(0)
    model = timm.create_model("lowformer_b0", num_classes=3)
    layers = sum(isinstance(module, nn.ConvTranspose2d) for module in model.modules())
    assert layers > 0
    assert_accelerates(model, lambda model: model(sound(1, 3, 64, 64)), layers)


def test_segmentation_models_pytorch() -> None:
    library = with_torchvision("segmentation_models_pytorch")
    torch.manual_seed(0)
    linknet = library.Linknet("resnet18", encoder_weights=None, classes=2)
    assert_accelerates(linknet, lambda model: model(sound(1, 3, 64, 64)), 5)
    x = sound(1, 3, 64, 64)
    with torch.no_grad():
        expected = linknet(x)
        report = polyphase.accelerate(linknet, fuse=True)
        assert all(len(block.fused) == 2 for block in report.blocks), report  # batch norm and ReLU
        torch.testing.assert_close(linknet(x), expected, rtol=1e-3, atol=1e-4)
    dpt = library.DPT("tu-vit_tiny_patch16_224", encoder_weights=None, classes=2)
    assert_accelerates(dpt, lambda model: model(sound(1, 3, 224, 224)), 2)


def test_deepspeed_checkpoints(tmp_path: Path) -> None:
    """Of an accelerated model, for PyTorch's, at every stage of ZeRO: in a process of its own, on the CPU."""
    pytest.importorskip("deepspeed")
    script = """
        import copy, os, torch, polyphase
        os.environ |= {"DS_ACCELERATOR": "cpu", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        import deepspeed
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        deepspeed.init_distributed(
            "gloo", auto_mpi_discovery=False, init_method="file://FOLDER/ranks", rank=0, world_size=1
        )
        theirs = torch.nn.Sequential(torch.nn.ConvTranspose2d(4, 2, 3, 2))
        ours = polyphase.accelerate(copy.deepcopy(theirs)).model
        x = torch.randn(2, 4, 5, 5)
        expected = copy.deepcopy(theirs)
        expected(x).square().mean().backward()
        torch.optim.SGD(expected.parameters(), 0.1).step()
        for stage in (1, 2, 3):
            model = copy.deepcopy(ours)
            config = {"train_micro_batch_size_per_gpu": 2, "zero_allow_untested_optimizer": True}
            config |= {"zero_optimization": {"stage": stage}}
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
            engine.backward(engine(x).square().mean())
            engine.step()
            engine.save_checkpoint(f"FOLDER/{stage}")
            assert isinstance(engine.module[0], polyphase.ConvTranspose2d)
            theirs.load_state_dict(get_fp32_state_dict_from_zero_checkpoint(f"FOLDER/{stage}"))
            torch.testing.assert_close(theirs.state_dict(), expected.state_dict())
        print("right")
    """
    assert run_python(script.replace("FOLDER", str(tmp_path)), timeout=280).strip().endswith("right")


@pytest.mark.parametrize(
    ("target", "shapes", "config", "layers"),
    [
        ("transformers:SpeechT5HifiGan", ["1x9x8"], '{"model_in_dim": 8, "upsample_initial_channel": 64}', 4),
        ("monai.networks.nets:BasicUNet", ["1x1x32x32"], '{"spatial_dims": 2}', 4),
    ],
)
def test_report_of_a_library_s_class(target: str, shapes: list[str], config: str, layers: int) -> None:
    pytest.importorskip(target.partition(":")[0])
    file = load_target(target, shapes, config)
    model, cpu = file.build(torch.device("cpu"), torch.float32, 0), torch.device("cpu")
    assert len(polyphase.accelerate(model).swapped) == layers
    model(*file.inputs(cpu, torch.float32))
