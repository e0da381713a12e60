"""The zoo's models as data. To add a model, add an entry, and a builder if its architecture is new."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["ENTRIES", "Entry", "Setting"]

Setting = int | str


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One model of the zoo.

    ``builder`` is ``module:function`` within this package; it takes ``settings`` and ``architecture`` as keywords.
    Users may change the ``settings``. The ``architecture`` defines the model. ``reduced`` overrides both for the small
    size. ``minimum`` has the least values of settings, if they are larger than 1. ``source`` names the paper and the
    source of the parameter count. ``beyond_published`` names the top-level parameters that this count leaves out.
    """

    name: str
    description: str
    source: str
    builder: str
    published_parameters: int
    beyond_published: tuple[str, ...] = ()
    settings: Mapping[str, Setting]
    architecture: Mapping[str, object]
    reduced: Mapping[str, Any]
    minimum: Mapping[str, int] = field(default_factory=dict)


_REDUCED_TEXT = dict(batch=8, seq=16, layers=2, vocab=256, d=64)
_REDUCED_LLAMA = _REDUCED_TEXT | dict(ff=128, kv_heads=8, group=2, head_dim=8, context=16)
_SERVED: Mapping[str, Setting] = dict(task="train", tokens=128)


def _gpt(
    name: str, layers: int, d: int, heads: int, *, context: int = 1024, parameters: int, source: str
) -> Entry:
    return Entry(
        name=name,
        description=f"GPT, {layers} layers × {d}, {heads} heads; output tied to the embedding; no dropout",
        source=source,
        builder="transformers:gpt",
        published_parameters=parameters,
        settings=dict(
            batch=128,
            seq=context,
            layers=layers,
            vocab=50257,
            dtype="bfloat16",
            attention="fused",
            scan=1,
            remat=1,
            **_SERVED,
            context=context,
        ),
        architecture=dict(d=d, heads=heads),
        reduced=_REDUCED_TEXT | dict(heads=8, context=16),
    )


def _gpt2(name: str, layers: int, d: int, heads: int, parameters: int) -> Entry:
    source = "Radford et al. 2019, table 2; count of the released checkpoint"
    return _gpt(name, layers, d, heads, parameters=parameters, source=source)


def _llama3(name: str, layers: int, d: int, ff: int, group: int, parameters: int) -> Entry:
    return Entry(
        name=name,
        description=f"Llama-3, {layers} layers × {d}, {8 * group} heads on 8 key-value heads, rotary",
        source="Grattafiori et al. 2024 (arXiv 2407.21783), table 3; count of the released checkpoint",
        builder="llama:llama",
        published_parameters=parameters,
        settings=dict(
            batch=128,
            seq=8192,
            layers=layers,
            vocab=128256,
            dtype="bfloat16",
            attention="fused",
            scan=1,
            remat=1,
            **_SERVED,
            context=8192,
        ),
        architecture=dict(d=d, ff=ff, kv_heads=8, group=group, head_dim=128, theta=500_000.0),
        reduced=_REDUCED_LLAMA,
    )


_ALL = (
    Entry(
        name="mlp",
        description="Multilayer perceptron with ReLU, for teaching",
        source="no paper: the count is 1025·4096 + 2·4097·4096 + 4097·1024, weights and biases",
        builder="mlp:mlp",
        published_parameters=1025 * 4096 + 2 * 4097 * 4096 + 4097 * 1024,
        settings=dict(batch=256, layers=3, features=1024, hidden=4096, classes=1024, dtype="float32"),
        architecture={},
        reduced=dict(batch=8, layers=2, features=32, hidden=64, classes=16),
    ),
    Entry(
        name="alexnet",
        description="AlexNet in one column (no groups); dropout and local response norm left out",
        source="Krizhevsky et al. 2012, section 3; ungrouped count: learnopencv.com, 'Number of Parameters "
        "and Tensor Sizes in a CNN' (with groups the paper's '60 million')",
        builder="cnn:alexnet",
        published_parameters=62_378_344,
        settings=dict(batch=128, image=227, classes=1000, dtype="float32"),
        architecture=dict(channels=(96, 256, 384, 384, 256), hidden=4096),
        reduced=dict(batch=8, image=99, classes=16, channels=(16, 32, 32, 32, 32), hidden=64),
        minimum=dict(image=67),
    ),
    Entry(
        name="inception_v3",
        description="Inception V3 without the auxiliary classifier; batch norm in training mode; no dropout",
        source="Szegedy et al. 2015 (arXiv 1512.00567); torchvision inception_v3, aux_logits=False",
        builder="cnn_branched:inception",
        published_parameters=23_834_568,
        settings=dict(batch=128, image=299, classes=1000, dtype="float32"),
        architecture=dict(narrow=1, blocks=(3, 4, 2)),
        reduced=dict(batch=8, image=80, classes=16, narrow=8, blocks=(1, 1, 1)),
        minimum=dict(image=75),
    ),
    Entry(
        name="rnnlm",
        description="Language model of two LSTM layers of 2048 over 100,000 words; no dropout",
        source="PaSE (Elango 2021), section IV, after Mikolov et al. 2010; no count published: "
        "2·100000·2048 + 100000 + 2·4·(2·2048² + 2048) from the sizes",
        builder="rnn:rnnlm",
        published_parameters=2 * 100_000 * 2048 + 100_000 + 2 * 4 * (2 * 2048**2 + 2048),
        settings=dict(batch=64, seq=256, layers=2, vocab=100_000, dtype="float32"),
        architecture=dict(d=2048, hidden=2048),
        reduced=dict(batch=8, seq=16, vocab=256, d=32, hidden=32),
    ),
    Entry(
        name="transformer",
        description="Encoder-decoder transformer (base), 6 + 6 layers; all three tables tied; no dropout, "
        "no label smoothing",
        source="Vaswani et al. 2017, table 3, with PaSE's vocabulary of 50,000; no count published for that: "
        "6·(4·512² + F) + 6·(8·512² + F) + 50000·512 + 30·1024, F = 2·512·2048 + 2560, from the sizes",
        builder="seq2seq:seq2seq",
        published_parameters=18 * 4 * 512**2 + 12 * (2 * 512 * 2048 + 2560) + 50_000 * 512 + 30 * 1024,
        settings=dict(
            batch=64, seq=256, layers=6, vocab=50_000, dtype="bfloat16", attention="plain", scan=1, remat=1
        ),
        architecture=dict(d=512, heads=8, ff=2048),
        reduced=_REDUCED_TEXT | dict(ff=128),
    ),
    Entry(
        name="resnet101",
        description="ResNet-101, stride in the 3×3 convolutions; batch norm in training mode",
        source="He et al. 2015 (arXiv 1512.03385), table 1; torchvision resnet101",
        builder="cnn:resnet",
        published_parameters=44_549_160,
        settings=dict(batch=128, image=224, classes=1000, dtype="float32"),
        architecture=dict(stem=64, stages=((3, 64), (4, 128), (23, 256), (3, 512)), expansion=4),
        reduced=dict(batch=8, image=64, classes=16, stem=16, stages=((1, 8), (2, 8), (2, 16), (1, 16))),
    ),
    Entry(
        name="vgg19",
        description="VGG-19 (configuration E); no dropout",
        source="Simonyan & Zisserman 2014 (arXiv 1409.1556), tables 1 and 2; torchvision vgg19",
        builder="cnn:vgg",
        published_parameters=143_667_240,
        settings=dict(batch=128, image=224, classes=1000, dtype="float32"),
        architecture=dict(stages=((2, 64), (2, 128), (4, 256), (4, 512), (4, 512)), hidden=4096),
        reduced=dict(
            batch=8,
            image=64,
            classes=16,
            stages=((1, 8), (1, 16), (2, 32), (2, 32), (2, 32)),
            hidden=64,
        ),
        minimum=dict(image=32),
    ),
    Entry(
        name="densenet121",
        description="DenseNet-121 (growth 32); batch norm in training mode",
        source="Huang et al. 2016 (arXiv 1608.06993), table 1; torchvision densenet121",
        builder="cnn_branched:densenet",
        published_parameters=7_978_856,
        settings=dict(batch=128, image=224, classes=1000, dtype="float32"),
        architecture=dict(stem=64, growth=32, blocks=(6, 12, 24, 16)),
        reduced=dict(batch=8, image=64, classes=16, stem=16, growth=8, blocks=(2, 2, 2, 2)),
        minimum=dict(image=32),
    ),
    Entry(
        name="bert_base",
        description="BERT-base pre-training; the count is of encoder, embeddings and pooler, without the "
        "masked-token and next-sentence heads; no dropout",
        source="Devlin et al. 2018 (arXiv 1810.04805), section 3 ('110M'); transformers' BertModel",
        builder="transformers:bert",
        published_parameters=109_482_240,
        beyond_published=("masked", "next"),
        settings=dict(
            batch=256, seq=512, layers=12, vocab=30522, dtype="bfloat16", attention="fused", scan=1, remat=1
        ),
        architecture=dict(d=768, heads=12, context=512),
        reduced=_REDUCED_TEXT | dict(heads=8, context=16),
    ),
    _gpt2("gpt2", 12, 768, 12, 124_439_808),
    _gpt2("gpt2_medium", 24, 1024, 16, 354_823_168),
    _gpt2("gpt2_large", 36, 1280, 20, 774_030_080),
    _gpt2("gpt2_xl", 48, 1600, 25, 1_557_611_200),
    _gpt(
        "gpt_1_3b",
        24,
        2048,
        16,
        context=2048,
        parameters=1_315_723_264,
        source="Brown et al. 2020, table 2.1 (GPT-3 XL, '1.3B'), 16 heads as in GPT-Neo 1.3B, whose "
        "1,315,575,808 lack the 24·3·2048 biases of queries, keys and values",
    ),
    _llama3("llama3_8b", 32, 4096, 14336, 4, 8_030_261_248),
    _llama3("llama3_70b", 80, 8192, 28672, 8, 70_553_706_496),
    _llama3("llama3_405b", 126, 16384, 53248, 16, 405_853_388_800),
    Entry(
        name="mixtral_8x7b",
        description="Mixtral 8×7B: 2 of 8 experts per token, dispatched by einsum within each batch row; each "
        "expert has a capacity of capacity_percent of its even share; router loss left out",
        source="Jiang et al. 2024 (arXiv 2401.04088), table 1 (46.7B); count of the released checkpoint",
        builder="llama:mixtral",
        published_parameters=46_702_792_704,
        settings=dict(
            batch=128,
            seq=4096,
            layers=32,
            vocab=32000,
            capacity_percent=125,
            dtype="bfloat16",
            attention="fused",
            scan=1,
            remat=1,
            **_SERVED,
            context=4096,
        ),
        architecture=dict(
            d=4096,
            ff=14336,
            kv_heads=8,
            group=4,
            head_dim=128,
            theta=1_000_000.0,
            experts=8,
            chosen=2,
        ),
        reduced=_REDUCED_LLAMA | dict(ff=64),
    ),
    Entry(
        name="vit_l16",
        description="Vision transformer, large, patches of 16², class token; no dropout",
        source="Dosovitskiy et al. 2020 (arXiv 2010.11929), table 1 ('307M'); torchvision vit_l_16",
        builder="transformers:vit",
        published_parameters=304_326_632,
        settings=dict(
            batch=4096,
            image=224,
            layers=24,
            classes=1000,
            dtype="bfloat16",
            attention="plain",
            scan=1,
            remat=1,
        ),
        architecture=dict(d=1024, heads=16, patch=16),
        reduced=dict(batch=8, image=32, layers=2, classes=16, d=64, heads=8, patch=8),
    ),
)

ENTRIES: Mapping[str, Entry] = {found.name: found for found in _ALL}
