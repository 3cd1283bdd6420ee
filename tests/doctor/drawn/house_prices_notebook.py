# coding: utf-8
# In[1]:
import numpy as np
import pandas as pd
import torch
import torch.nn as nn
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from torch.utils.data import DataLoader, TensorDataset

SEED = 2021
torch.manual_seed(SEED)

# In[2]:
df = pd.read_csv("../input/house-prices/train.csv")
num_cols = [c for c in df.columns if df[c].dtype != "object" and c not in ("Id", "SalePrice")]
df[num_cols] = df[num_cols].fillna(df[num_cols].median())
sc = StandardScaler()
df[num_cols] = sc.fit_transform(df[num_cols])  # wrong: fitted on all rows, those of the validation included
y = np.log1p(df["SalePrice"]).astype("float32")
df[num_cols].describe()

# In[3]:
X_tr, X_va, y_tr, y_va = train_test_split(df[num_cols].astype("float32"), y, test_size=0.15, random_state=SEED)
tr = TensorDataset(torch.from_numpy(X_tr.values), torch.from_numpy(y_tr.values))
va = TensorDataset(torch.from_numpy(X_va.values), torch.from_numpy(y_va.values))
tr_dl = DataLoader(tr, batch_size=128, shuffle=True)
va_dl = DataLoader(va, batch_size=512)


# In[4]:
class Tabular(nn.Module):
    def __init__(self, n_in, h=256, p=0.25):
        super(Tabular, self).__init__()
        self.net = nn.Sequential(
            nn.Linear(n_in, h),
            nn.SiLU(),
            nn.Dropout(p),
            nn.Linear(h, h // 2),
            nn.SiLU(),
            nn.Linear(h // 2, 1),
        )

    def forward(self, x):
        return self.net(x)


# In[5]:
net = Tabular(len(num_cols))
crit = nn.MSELoss()
opt = torch.optim.AdamW(net.parameters(), lr=2e-3, weight_decay=1e-2)
sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=60)

# In[6]:
best_rmse, best_sd, hist = 1e9, None, []
for ep in range(60):
    net.train()
    for xb, yb in tr_dl:
        opt.zero_grad()
        out = net(xb)
        l = crit(out, yb)  # wrong: out is (B, 1), yb is (B,)
        l.backward()
        opt.step()
    sched.step()
    net.eval()
    se, n = 0.0, 0
    with torch.no_grad():
        for xb, yb in va_dl:
            se += ((net(xb).squeeze(1) - yb) ** 2).sum().item()
            n += len(yb)
    rmse = (se / n) ** 0.5
    hist.append(rmse)
    if rmse < best_rmse:
        best_rmse = rmse
        best_sd = net.state_dict()  # wrong: a reference to weights that go on changing
print(best_rmse)

# In[7]:
net.load_state_dict(best_sd)
net.eval()
test = pd.read_csv("../input/house-prices/test.csv")
test[num_cols] = sc.transform(test[num_cols].fillna(0))
with torch.no_grad():
    pred = net(torch.tensor(test[num_cols].values, dtype=torch.float32)).squeeze(1)
pd.DataFrame({"Id": test.Id, "SalePrice": np.expm1(pred.numpy())}).to_csv("submission.csv", index=False)
