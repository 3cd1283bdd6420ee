"""Data sets and loaders.

augmented_validation       A model is evaluated on randomly augmented images
batch_norm_of_one          Batch norm is trained with a batch of one sample
device_in_workers          A data set uses CUDA and is read by worker processes
files_without_workers      Files are decoded in the training process
filled_one_by_one          A batch's tensor is filled one number at a time
fitted_before_split        Features are scaled with statistics of all data, and split afterwards
loader_made_in_loop        A loader is created again in each epoch, from the same data
model_gets_loader          A model is called with the loader itself
non_blocking_unpinned      A copy with non_blocking=True has a source that is not pinned
normalized_before_tensor   ``Normalize`` comes before ``ToTensor``
options_of_no_workers      A loader has options for worker processes but no worker processes
ragged_last_batch          The last batch is smaller than the others
sampler_without_epoch      A DistributedSampler never gets the epoch
shuffle_and_sampler        A loader gets both ``shuffle=True`` and a sampler
shuffle_missing            The training data are not shuffled
slices_in_one_order        Batches are sliced from the data at the same places in each epoch
unpinned                   Batches for a CUDA device come from memory that is not pinned
unpinned_custom_batch      Batches of a custom class are not pinned
"""

from ..rule import rules_in

RULES = rules_in(__name__, __path__)
"""The rules of this group, in the order of their names."""
