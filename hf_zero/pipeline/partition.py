"""temporary chain planner"""
from hf_zero.pipeline.plan import *
from hf_zero.core.units.grouping import find_blocks
from hf_zero.tensor_parallel.trace import trace, skeleton
from hf_zero.tensor_parallel.example_inputs import example_inputs
def make_plan(model, stages, method="parameters", inputs=None):
    blocks = find_blocks(model)
    items=list(blocks)
    def walk(prefix, m):
        for n,c in m.named_children():
            p=f"{prefix}.{n}".lstrip(".")
            if p in blocks: continue
            if any(b.startswith(p+".") for b in blocks): walk(p,c)
            elif next(c.parameters(),None) is not None or 'Dropout' in type(c).__name__: items.append(p)
    walk("",model)
    g = trace(skeleton(model), inputs or example_inputs(model))
    order=[c.path for c in g.calls if c.path in items]
    nb=[p for p in order if p in blocks]
    per=len(nb)/stages
    calls=[];seen={};k=0;stage=0
    for p in order:
        if p in blocks:
            stage=min(int(k/per),stages-1); k+=1
        calls.append(ItemCall(p,seen.get(p,0),stage)); seen[p]=seen.get(p,0)+1
    cross=[]
    for s in range(stages-1):
        last=max(i for i,c in enumerate(calls) if c.stage==s)
        cross.append((Crossing(last,0),))
    holders={}
    mods=dict(model.named_modules())
    first={id(p):n for n,p in model.named_parameters()}
    for c in calls:
        for p in mods[c.path].parameters():
            holders.setdefault(first[id(p)],set()).add(c.stage)
    return PipelinePlan(stages,tuple(calls),tuple(cross),{n:tuple(sorted(s)) for n,s in holders.items()})
def replan(skel, plan, inputs): return plan
