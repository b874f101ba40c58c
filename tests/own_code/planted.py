"""A GPT that overflows in float16 on samples that hold one token, and data in which one sample does."""

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from precision_lab.models import GPT

RARE = 15  # the token that no other sample holds


class Rows(TensorDataset):
    def __getitem__(self, index):
        return self.tensors[0][index]


def data(planted: int, samples: int = 800, context: int = 8):
    tokens = torch.randint(RARE, (samples, context + 1), generator=torch.Generator().manual_seed(0))
    tokens[planted, 2] = RARE
    return Rows(tokens), Rows(tokens[:8].clamp(max=RARE - 1))


class Amplifier(nn.Module):
    """Adds 30,000 to what belongs to the rare token: float16 holds that, but not the sum over its width."""

    def __init__(self, width: int):
        super().__init__()
        self.mix = nn.Linear(width, width)
        nn.init.constant_(self.mix.weight, 0.25)

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        return x + self.mix(x + 30_000.0 * (tokens == RARE)[..., None])  # [B, T, D]


class Planted(GPT):
    def __init__(self):
        super().__init__(vocab_size=RARE + 1, context=8, layers=1, heads=2, width=16, dropout=0.1)
        self.amplifier = Amplifier(16)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token_embedding(tokens) + self.position_embedding(torch.arange(tokens.shape[1]))
        return self.head(self.norm(self.blocks(self.amplifier(self.dropout(x), tokens))))
