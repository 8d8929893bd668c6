import sys, time, torch
from functools import partial
from tests.support import ranks, zoo, parity
from tests.support.experts import *
from tests.support.models import ModelCase
from tests.support.parity import Run, check_bitwise, check
from tests.support.whole_tensors import OPTIMIZERS, plain
from hf_zero.optim.muon import muon_from_config, muon_parameters
import inspect
MIXTRAL="MixtralForCausalLM"
BOTH = dict(target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])
def say(*a):
    if ranks.rank()==0: print(time.strftime("%H:%M:%S"), *a, file=open("/tmp/four.log","a"))
def tryit(label, f):
    try: f(); say("ok", label)
    except Exception as e:
        import traceback; say("FAIL", label, str(e)[:1500], traceback.format_exc()[-1500:] if not isinstance(e, AssertionError) else "")
        raise
CASE = ModelCase(build=lambda: build(MIXTRAL), rows=mixed(MIXTRAL), forward=zoo.loss) if "rows" in inspect.signature(ModelCase).parameters else None
LISTED = None
def whole(name, run, size, make=lambda: build(MIXTRAL), forward=zoo.loss):
    mk, groups = OPTIMIZERS[name] if name in OPTIMIZERS else (None, None)
    case = ModelCase(build=make, rows=mixed(MIXTRAL), forward=forward)
    if name == "muon":
        m = make(); opt = muon_from_config({"lr": 1e-2}, [p for p in m.parameters() if p.requires_grad], muon_parameters(m))
    else:
        m = make(); opt = mk(groups(m))
    engine = parity.initialize(m, with_experts(run, size) if size>1 else run, optimizer=opt, model_parameters=None)
    tr = parity.train(engine, case.rows, case.forward, run)
    tr.masters = {k: v for k, v in tr.masters.items() if v is not None}
    engine.destroy()
    if ranks.rank()==0:
        if name == "muon":
            OPTIMIZERS["muon"] = (lambda g: muon_from_config({"lr": 1e-2}, g[0], g[1]), None)
            import tests.support.whole_tensors as wt
            # reference
            twins = make(); 
            OPTIMIZERS["muon"] = (lambda params: muon_from_config({"lr": 1e-2}, params[0]["params"], set(id(p) for p in params[0]["muon"])), lambda model: [{"params": [p for p in model.parameters() if p.requires_grad], "muon": [p for p in model.parameters() if id(p) in muon_parameters(model)]}])
        check(tr, plain(name, case, run, ranks.world()), run, f"{name} {size}")
        if name == "muon": del OPTIMIZERS["muon"]
def groups_():
    for stage in (3, 1):
        z = {"zero_optimization": {"mics_shard_size": 2}}
        tryit(f"mics {stage}", lambda: check_experts(MIXTRAL, Run(stage, accumulation=2, clip=.1, extra=z), 2))
    hpz = {"zero_optimization": {"zero_hpz_partition_size": 2}}
    tryit("hpz", lambda: check_experts(MIXTRAL, Run(3, accumulation=2, clip=.1, extra=hpz), 2))
    tryit("param_shard", lambda: check_experts(MIXTRAL, Run(3, accumulation=2, clip=.1, extra={"hf_zero": {"param_shard_size": 2}}), 2))
def wholes():
    for stage, name in ((1,"LAMB"),(3,"LAMB"),(2,"Adafactor"),(0,"LAMB"),(3,"muon"),(0,"muon"),(1,"8 bit")):
        tryit(f"{name} {stage}", lambda: whole(name, Run(stage, clip=.1), 2))
    fw = lambda model, batch: model(**batch)
    for stage in (0,3):
        tryit(f"listed {stage}", lambda: whole("LAMB", Run(stage), 2, build_listed, fw))
    tryit("adapters", lambda: whole("RowScaled", Run(2), 2, lambda: with_adapters(build(MIXTRAL), **BOTH)))
    tryit("adapters", lambda: whole("LAMB", Run(0), 2, lambda: with_adapters(build(MIXTRAL), **BOTH)))
    tryit("mics whole", lambda: whole("LAMB", Run(3, extra={"zero_optimization": {"mics_shard_size": 2}}), 2))
if __name__=="__main__":
    for f in sys.argv[1:]:
        name, n = f.split(":"); ranks.run_ranks(globals()[name], int(n), timeout=540) if "timeout" in inspect.signature(ranks.run_ranks).parameters else ranks.run_ranks(globals()[name], int(n))
