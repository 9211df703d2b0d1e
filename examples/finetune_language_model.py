"""Fine-tune a language model of transformers with LoRA of peft in three stages, on padded sentences: padding counts in no loss.

python examples/finetune_language_model.py --out out/language
Started again, the script goes on from its last checkpoint, with the same losses, bit for bit.
"""

import argparse
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

import pipecompile as pc

WORDS, LENGTH, PADDING = 32, 16, -100


def sentences(count: int, seed: int) -> TensorDataset:
    """Return sentences of 4 to LENGTH words, each decided by the one before, and as labels the next words, PADDING after the end."""
    rule, draw = torch.randperm(WORDS, generator=torch.Generator().manual_seed(7)), torch.Generator().manual_seed(seed)
    words = [torch.randint(WORDS, (count,), generator=draw)]
    for _ in range(LENGTH):
        words.append(rule[words[-1]])
    text, lengths = torch.stack(words, 1), torch.randint(4, LENGTH + 1, (count, 1), generator=draw)
    return TensorDataset(text[:, :-1], text[:, 1:].masked_fill(torch.arange(LENGTH) >= lengths, PADDING))


def loss_of(output: dict[str, Tensor], target: Tensor) -> Tensor:
    return cross_entropy(output["logits"].float().flatten(0, 1), target.flatten(), ignore_index=PADDING)


def right(output: dict[str, Tensor], target: Tensor) -> Tensor:
    return (output["logits"].argmax(-1) == target)[target != PADDING].float().mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="out/language", help="directory of the checkpoint")
    parser.add_argument("--epochs", type=int, default=3, help="epochs in all")
    parser.add_argument("--amp", action="store_true", help="compute in bfloat16 where autocast does")
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # without GPUs the stages share the cores
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    lora = LoraConfig(task_type="CAUSAL_LM", r=8, target_modules=["q_proj", "v_proj"], modules_to_save=["lm_head"])
    model = get_peft_model(LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, use_cache=False, **sizes)), lora)
    pipe = pc.compile(model, 3, n_microbatches=4, loss_fn=loss_of, cost="analytic")
    optimizer = torch.optim.AdamW([one for one in pipe.parameters() if one.requires_grad], lr=1e-2)
    rates = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    parts, file, first = {"model": pipe, "optimizer": optimizer, "rates": rates}, Path(options.out) / "last.pt", 0
    if file.exists():
        saved = torch.load(file)
        for name, part in parts.items():
            part.load_state_dict(saved[name])
        first = saved["epoch"]
    file.parent.mkdir(parents=True, exist_ok=True)
    training, validation = sentences(192, seed=1), sentences(64, seed=2)
    for epoch in range(first, options.epochs):
        pipe.train()
        order = torch.Generator().manual_seed(epoch)  # of the epoch alone, so that a resumed run has the same one
        for number, (text, labels) in enumerate(DataLoader(training, 16, shuffle=True, generator=order)):
            with torch.autocast("cpu", torch.bfloat16, enabled=options.amp):
                loss = pipe.step(input_ids=text, target=labels)
            optimizer.step()
            optimizer.zero_grad()
            print(f"epoch {epoch}  batch {number}  loss {loss.item():.9f}", flush=True)
        rates.step()
        result = pipe.evaluate(DataLoader(validation, batch_size=32), right)
        print(f"epoch {epoch}  validation loss {result.loss:.4f}  right {result.metrics['metric']:.1%}", flush=True)
        torch.save({n: p.state_dict() for n, p in parts.items()} | {"epoch": epoch + 1}, file.with_suffix(".new"))
        file.with_suffix(".new").replace(file)  # a crash while writing leaves the checkpoint before


if __name__ == "__main__":
    main()
