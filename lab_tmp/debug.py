import traceback, time, sys, torch, warnings
T0=time.time()
import deeppcr
from deeppcr.diffusion import *
from deeppcr.diffusion.window import graphs, planned, sliding, prepared
from deeppcr.graphs.record import scratch_of
from deeppcr_paper import ddpm
from deeppcr_paper.models import AtSteps, ResidualMLP, UNet
dev=torch.device('cuda'); torch.manual_seed(0)
orig=graphs.Replayed.record
def record(self, call):
    try: return orig(self, call)
    except Exception as e:
        print('RECORD FAILED', call.func.__qualname__, call.args); traceback.print_exc(limit=-14, file=sys.stdout); sys.stdout.flush(); raise
graphs.Replayed.record=record
S=Schedule.linear(1000)
def go(name, net, shape, L, step, n=4, **kw):
    try:
        sch=S.take(L) if L<1000 else S
        noise=Noise.draw(shape, steps=L if isinstance(step,DDPM) else None, generator=torch.Generator(dev).manual_seed(0))
        with torch.no_grad():
            ref=sample(net,sch,noise,step=step,solver=deeppcr.Loop(by="graph"),**kw).final
            for k in range(2):
                torch.cuda.synchronize(); t=time.time(); sample(net,sch,noise,step=step,solver=deeppcr.Loop(by="graph"),**kw); torch.cuda.synchronize(); tl=time.time()-t
            ts=[]
            for k in range(n):
                torch.cuda.synchronize(); t=time.time(); f=sample(net,sch,noise,step=step,**kw); torch.cuda.synchronize(); ts.append(round(1e3*(time.time()-t),1))
        print(name,L,shape,type(step).__name__,'loop %.1f'%(1e3*tl),'found',ts,'its',int(f.iterations.max()),'rows %.2f'%(f.evaluations.double().mean()/L),'err %.1e'%(f.final-ref).abs().max(),f.result.name,f.plan.notes[2:],'%.1f GiB'%(torch.cuda.memory_reserved()/2**30),flush=True)
    except Exception: traceback.print_exc(file=sys.stdout); sys.stdout.flush()
warnings.simplefilter('ignore')
print('settings',torch.backends.cuda.matmul.fp32_precision,torch.backends.cudnn.conv.fp32_precision)
small=ddpm.unet(32,3,32).to(dev).eval().requires_grad_(False)
go('small unet',small,(1,3,32,32),50,DDIM(),n=3)
big=ddpm.unet(32,3,128).to(dev).eval().requires_grad_(False)
go('big unet',big,(1,3,32,32),100,DDIM())
go('big unet',big,(4,3,32,32),50,DDIM())
with torch.autocast('cuda',torch.bfloat16): go('big unet bf16',big,(1,3,32,32),100,DDPM())
torch.backends.cuda.matmul.fp32_precision=torch.backends.cudnn.conv.fp32_precision='ieee'
for L in (50,1000):
    sch=S.take(L) if L<1000 else S
    for name,net,shape in (('mlp',ResidualMLP(64,hidden=2048),(64,)),('unet16',UNet(1,base=16),(1,16,16))):
        d=AtSteps(net.to(dev),sch.alphas_bar).to(dev).eval().requires_grad_(False)
        for b in (1,64):
            go(name,d,(b,*shape),L,DDPM(),n=6)
print('total',time.time()-T0)
