import torch
import torch.nn.functional as F
from torchvision import datasets, models, transforms

device = "cuda" if torch.cuda.is_available() else "cpu"
model = models.resnet18(num_classes=10)
model.load_state_dict(torch.load("cifar.pt", map_location=device))
model.to(device)
model.eval()
test = datasets.CIFAR10("d", train=False, transform=transforms.ToTensor())
loader = torch.utils.data.DataLoader(test, batch_size=1)
hits = 0
for image, label in loader:
    image, label = image.to(device), label.to(device)
    image.requires_grad = True
    loss = F.cross_entropy(model(image), label)
    model.zero_grad()
    loss.backward()
    attacked = (image + 0.03 * image.grad.sign()).clamp(0, 1)
    hits += (model(attacked).argmax(1) == label).item()
print(hits / len(loader))
