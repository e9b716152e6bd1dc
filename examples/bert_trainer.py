"""A BERT in transformers' Trainer: pruned while it trains, demasked, trained on, saved, served.

`PruneCallback` masks attention heads before optimizer steps, where gradients are; at the end of
the training it demasks the model, and `callback.slim` is a `BertForSequenceClassification` with
smaller layers. A second Trainer trains it on.

The model is tiny and has random weights; take yours with
`AutoModelForSequenceClassification.from_pretrained`. For sizes that differ by layer no config has
words, so `demask.save` writes the file, and `load` puts it into the class.

At BERT's own size, with curves: [encoder_trainer.py](encoder_trainer.py). See
[pruning](../docs/prune.md).

It prints:

```text
BertForSequenceClassification 16 of 32 columns of queries are left
loaded: True
served: True
```
"""

import numpy as np
import onnxruntime
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback

import demask
from demask import prune
from demask.prune.adapters.transformers import PruneCallback

torch.manual_seed(0)
config = BertConfig(
    vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64, num_labels=2
)
model = BertForSequenceClassification(config)
tokens = torch.randint(1, 50, (32, 12))
data = [{"input_ids": row, "labels": int(row[0] > 25)} for row in tokens]
settings = TrainingArguments(
    output_dir="runs",
    max_steps=4,
    per_device_train_batch_size=8,
    report_to=[],
    save_strategy="no",
    disable_tqdm=True,
    use_cpu=True,
)

example = {"input_ids": tokens[:2]}
pruner = prune.Pruner(model, example, structure="head", score=prune.Taylor(), schedule=prune.Cubic(0, 0.5, steps=2))
callback = PruneCallback(pruner, every=2, rounds=2, demask_with=example)
trainer = Trainer(model, settings, train_dataset=data, callbacks=[callback])
trainer.remove_callback(PrinterCallback)  # of losses
trainer.train()

slim = callback.slim
query = slim.bert.encoder.layer[0].attention.self.query
print(type(slim).__name__, query.out_features, "of 32 columns of queries are left")
trainer = Trainer(slim, settings, train_dataset=data)
trainer.remove_callback(PrinterCallback)
trainer.train()  # trains on
slim.eval()

demask.save(slim, "slim.demask")
loaded = demask.load("slim.demask", into=BertForSequenceClassification(config)).eval()
print("loaded:", torch.equal(loaded(tokens).logits, slim(tokens).logits))

demask.to_onnx(slim, "slim.onnx", (), {"input_ids": tokens[:2]})
session = onnxruntime.InferenceSession("slim.onnx", providers=["CPUExecutionProvider"])
logits = session.run(None, {"input_ids": tokens.numpy()})[0]
print("served:", np.allclose(logits, slim(tokens).logits.detach().numpy(), atol=1e-4))
