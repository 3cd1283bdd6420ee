import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, AutoTokenizer, get_linear_schedule_with_warmup

tokenizer = AutoTokenizer.from_pretrained("bert-base-uncased")
model = AutoModelForSequenceClassification.from_pretrained("bert-base-uncased", num_labels=2)
device = torch.device("cuda")
model.to(device)


def collate(rows):
    batch = tokenizer([r["text"] for r in rows], padding=True, truncation=True, return_tensors="pt")
    batch["labels"] = torch.tensor([r["label"] for r in rows])
    return batch


def main(train_rows, val_rows):
    loader = DataLoader(train_rows, 32, shuffle=True, collate_fn=collate, pin_memory=True)
    val_loader = DataLoader(val_rows, 64, collate_fn=collate)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    scheduler = get_linear_schedule_with_warmup(optimizer, 100, 3 * len(loader))
    for epoch in range(3):
        model.train()
        for step, batch in enumerate(loader):
            batch = {k: v.to(device, non_blocking=True) for k, v in batch.items()}
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = model(**batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if step % 50 == 0:
                print(epoch, step, loss.item())
        model.eval()
        hits = 0
        with torch.inference_mode():
            for batch in val_loader:
                batch = {k: v.to(device) for k, v in batch.items()}
                hits += (model(**batch).logits.argmax(-1) == batch["labels"]).sum()
        print(epoch, hits.item())
